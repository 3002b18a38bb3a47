"""The command line. A package of its own, beside the library, so that asking for help never imports torch."""
