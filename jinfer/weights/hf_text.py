"""The language model inside a checkpoint that reads images too (Gemma 3 from 4B on)."""

from jinfer.weights.hf_section import Section

TEXT_OF = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
IGNORED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
RENAMED = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
           ("model.language_model.", "model."))
# What files leave out because transformers' Gemma3TextConfig has it.
_GEMMA3 = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
           "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}


def reads_images(main: Section) -> bool:
    names = main.data.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in TEXT_OF


def text_section(main: Section) -> Section:
    """The configuration of the language model, which is all that jinfer runs: `main` itself if it is no part."""
    if not reads_images(main):
        return main
    text = main.inner("text_config")
    outer = {key: main.data[key] for key in ("bos_token_id", "eos_token_id", "quantization_config") if key in main.data}
    return Section(text.path, {**_GEMMA3, **outer, **text.data,
                               "architectures": [TEXT_OF[main.data["architectures"][0]]]})
