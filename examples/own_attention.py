"""Test an attention of your own and count its cost: python examples/own_attention.py

`neighbours.py`, beside this file, is the whole attention. Every command accepts a registered attention.
"""

from collections import Counter
from pathlib import Path

import attendless


def main() -> None:
    attendless.load_plugin(Path(__file__).with_name("neighbours.py"))
    verdicts = list(attendless.check("neighbours:radius=1"))
    print(dict(Counter(verdict.result for verdict in verdicts)))
    for attention in ("full", "full/neighbours:radius=1/full"):
        model = attendless.open_model("columnar_micro_patch4_32", attention=attention, below_breakeven="keep")
        print(
            f"{model.attention}: {sum(layer.macs.core for layer in model.costs()):,} multiply-accumulates of attention"
        )


if __name__ == "__main__":
    main()
