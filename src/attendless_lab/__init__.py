"""Users of the library: the papers' tables, comparisons of attentions, the explorer and the demo."""
