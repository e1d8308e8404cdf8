"""Attention of packed whole sequences over their own keys and values."""
