"""Looking at attention in the browser: `attendless explore`.

picture.py   what a visitor may hand in, and what the model sees of it
sides.py     the model with an attention: its maps for one patch, its answer, its cost
paint.py     pictures of them, by NumPy and Pillow
board.py     the page's pictures with their words, as HTML
page.py      the page (gradio), which knows nothing but the above
"""
