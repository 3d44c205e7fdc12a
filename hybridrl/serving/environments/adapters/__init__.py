"""Classes that environment processes load for packages of other people.

The processes load each file by its path, also with an interpreter that has no `hybridrl`: these modules import only the
standard library and, inside functions, the package that they adapt. The driver does not import them.
"""
