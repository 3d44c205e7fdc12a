"""A run's directory as data for the views of the page: read as it grows, never loaded whole."""
