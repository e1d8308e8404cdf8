"""Offline jobs: JSONL in, JSONL out."""
