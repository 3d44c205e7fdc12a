"""One script per dataset: raw rows in, parquet files in the row format of `RLHFDataset` out."""
