"""`python -m attendless`: the command line, which is a separate package that the library does not import."""

import runpy

if __name__ == "__main__":
    runpy.run_module("attendless_cli", run_name="__main__")
