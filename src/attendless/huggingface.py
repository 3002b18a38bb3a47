"""attendless attentions in models of Hugging Face's transformers.

`register` makes a spec known to transformers, under a name for `set_attn_implementation`. `watch` and `unwatch` record
the patch grid of a model's images. `close` undoes both. `register_family` adds a family of models. `attendless.patch`
and `attendless.convert` do all that is needed in one call.
"""

from .integrations.hf_interface.interface import close, register, unwatch, watch
from .integrations.support import register_family

__all__ = ["close", "register", "register_family", "unwatch", "watch"]
