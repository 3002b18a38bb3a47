"""Ways to compute the operations, one file each. Importing this registers them all."""

import sys

from ...plugins import import_package

import_package(sys.modules[__name__])
