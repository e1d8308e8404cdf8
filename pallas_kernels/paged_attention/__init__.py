"""Attention of ragged query chunks over KV pages."""
