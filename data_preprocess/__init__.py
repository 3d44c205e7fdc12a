"""One script per dataset, from raw rows to the row format of `RLHFDataset`."""
