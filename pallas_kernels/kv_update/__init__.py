"""Writing new keys and values into their pages."""
