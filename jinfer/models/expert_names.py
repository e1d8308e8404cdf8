"""Where checkpoints keep the matrices of a mixture of experts."""

import dataclasses

from jinfer.config import ModelConfig
from jinfer.models.expert_parameters import of_expert, pairs_apart
from jinfer.models.parameter import Parameter, Rows, plain, side_by_side


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of one layer's tensors.

    Attributes:
      router: prefix of .weight [E, D] and, with config.experts.router_bias, .bias [E].
      experts: prefix of the experts. One tensor an expert and projection: {experts}.{e}.{projection}.weight, gate and
        up [F, D], down [D, F] (and .bias, with config.experts.bias).
      projections: what gate, up and down are called there.
      stacked: gpt-oss instead: {experts}.gate_up_proj [E, D, 2F], each gate's column before its up's, and down_proj
        [E, F, D]; biases gate_up_proj_bias [E, 2F] and down_proj_bias [E, D].
      selection_bias: the tensor [E] of config.experts.selection_bias.
      shared: prefix of the network that config.experts.shared experts are.
    """

    router: str
    experts: str
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: bool = False
    selection_bias: str | None = None
    shared: str | None = None

    def weights(self, config: ModelConfig, parts: int) -> tuple[list[Parameter], list[Parameter]]:
        """(gate and up [2F, D], down [D, F]) of each expert; gate and up lie for `parts` devices (`side_by_side`)."""
        return self._read(config, parts, biases=False)

    def biases(self, config: ModelConfig, parts: int) -> tuple[list[Parameter], list[Parameter]]:
        """(gate and up [2F], down [D]) of each expert."""
        return self._read(config, parts, biases=True)

    def _read(self, config: ModelConfig, parts: int, *, biases: bool) -> tuple[list[Parameter], list[Parameter]]:
        assert config.experts is not None
        count, width, model = config.experts.count, config.experts.intermediate_size, config.hidden_size
        gate_up_axes: tuple[str | None, ...] = ("ffn",) if biases else ("ffn", None)
        down_axes: tuple[str | None, ...] = (None,) if biases else (None, "ffn")
        gate_ups, downs = [], []
        for expert in range(count):
            if self.stacked:
                suffix = "_bias" if biases else ""
                pairs = of_expert(f"{self.experts}.gate_up_proj{suffix}",
                                  (count, 2 * width) if biases else (count, model, 2 * width), expert, gate_up_axes)
                gate_ups.append(pairs_apart(pairs, parts))
                downs.append(of_expert(f"{self.experts}.down_proj{suffix}",
                                       (count, model) if biases else (count, width, model), expert, down_axes))
            else:
                suffix = "bias" if biases else "weight"
                gate, up, down = (f"{self.experts}.{expert}.{name}.{suffix}" for name in self.projections)
                pair = (Rows(gate, 0, width), Rows(up, 0, width))
                gate_ups.append(side_by_side(pair, (width,) if biases else (width, model), gate_up_axes, parts))
                downs.append(plain(down, (model,) if biases else (model, width), down_axes))
        return gate_ups, downs
