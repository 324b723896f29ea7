"""The steps from each schema version to the next."""
