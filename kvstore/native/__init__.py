"""The C kernel of the delta codec: its sources, and `build`, which compiles them to the module `kvstore._native`."""
