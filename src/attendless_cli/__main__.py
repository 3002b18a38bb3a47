"""`python -m attendless_cli`, which `python -m attendless` runs."""

from .main import run

if __name__ == "__main__":
    run()
