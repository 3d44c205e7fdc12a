"""The single controller: one driver program calls groups of worker processes as if each group were one object."""
