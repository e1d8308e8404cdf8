"""What a configuration compiles to, takes and can carry, on devices that need not be here."""
