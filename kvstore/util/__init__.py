"""Helpers that know nothing of stores."""
