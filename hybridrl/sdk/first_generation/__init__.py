"""The first generation of DLRover: a trainer that calls its roles through `RG_<ROLE>`; the roles are workloads."""
