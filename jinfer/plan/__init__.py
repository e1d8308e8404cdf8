"""What a configuration will compile to and take on devices that need not be here."""

from jinfer.plan.steps import Plan, StepReport, compile_steps, expected_collectives

__all__ = ["Plan", "StepReport", "compile_steps", "expected_collectives"]
