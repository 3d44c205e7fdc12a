"""Training data: parquet files, datasets, the order of prompts, seeds and tokenizers."""
