"""Compiling for devices that are not here, with the compilers that will compile for them."""
