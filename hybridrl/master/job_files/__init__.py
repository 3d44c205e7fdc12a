"""Jobs described in files: YAML, JSON, or Python with a builder."""
