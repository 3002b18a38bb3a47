"""`attendless explore`: inspect attention in the browser.

picture.py   the images that the page accepts, and their preprocessing
sides.py     a model with one attention: its maps for one patch, its prediction, its cost
paint.py     images of the maps, by NumPy and Pillow
board.py     images and captions of the page, as HTML
folder.py    the temporary folder of the page
page.py      the page (gradio), which uses only the above
"""
