"""The step: programs, device state, runner, the loop, outputs."""
