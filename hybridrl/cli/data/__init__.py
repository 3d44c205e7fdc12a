"""Commands about data: `hybridrl data list` and `inspect`, and the tasks that commands know by a word."""
