"""The settings: one frozen dataclass per section."""
