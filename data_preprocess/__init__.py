"""One script per dataset: reads raw rows, writes parquet files in the row format of `RLHFDataset`."""
