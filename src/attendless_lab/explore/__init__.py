"""`attendless explore`: inspect attention in the browser.

`take` reads the images that the page accepts. `Explorer` is a model with one attention: its maps for one patch, its
prediction, its cost. `paint` draws the maps with NumPy and Pillow, and `board` arranges them as HTML. `page` is the
gradio page and uses only the above.
"""
