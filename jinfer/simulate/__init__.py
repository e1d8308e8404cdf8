"""The production scheduler and page accounting in virtual time. Nothing here imports JAX."""
