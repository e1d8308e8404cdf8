"""Weight and KV formats."""
