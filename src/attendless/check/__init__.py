"""Interface checks: the rules that every attention and every token reducer follows."""
