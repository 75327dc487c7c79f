"""The operations with the C library, on CPU: one function for each, with the arguments of the plain one."""
