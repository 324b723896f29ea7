"""Engines: what makes the states that a store keeps."""
