"""Configuration: one YAML file, named profiles, typed and bounded values."""


class UserError(Exception):
    """A mistake of the user's: one clear line that names the file, the key and the fix; exit code 2."""
