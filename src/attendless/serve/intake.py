"""Reading and validation of requests: the body, and the image in it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator

from PIL import Image, UnidentifiedImageError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ..data.source import upright_rgb

#: Accepted formats, recognised by content; file names and content types are ignored.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
#: Seconds that a client has to send an image.
TO_SEND = 30.0


class Refused(Exception):
    """A refused request: the status (4xx or 503) and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


async def read_body(request: Request, most: int) -> bytes:
    """The bytes of the image: the body itself, or the first file of a form. Reads at most `most` bytes."""
    too_large = Refused(413, f"the body is larger than {most / 1e6:g} MB, the limit of this server")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdecimal() and int(length) > most:
        raise too_large

    async def read() -> bytes:
        found = bytearray()
        async for chunk in request.stream():
            found += chunk
            if len(found) > most:
                raise too_large
        return bytes(found)

    try:
        body = await asyncio.wait_for(read(), TO_SEND)
    except asyncio.TimeoutError:
        raise Refused(408, f"the body did not arrive within {TO_SEND:g} seconds") from None
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        body = await _first_file(request, body)
    if not body:
        raise Refused(400, "the body is empty: send an image, as the body or as a file of a form")
    return body


async def _first_file(request: Request, body: bytes) -> bytes:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(request.headers, stream(), max_files=1, max_fields=8)
    parser.spool_max_size = len(body) + 1  # never write to disk
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        reason = getattr(error, "message", None) or "it does not match its content type"
        raise Refused(400, f"the form cannot be read: {reason}") from None
    try:
        for value in form.values():
            if isinstance(value, UploadFile):
                return await value.read()
    finally:
        await form.close()
    raise Refused(400, "the form contains no file: send the image as one, such as curl -F file=@dog.jpg")


def read_picture(body: bytes, most_pixels: int) -> Image.Image:
    """Decode an upright RGB image. The size is checked before decoding."""
    try:
        image = Image.open(io.BytesIO(body), formats=FORMATS)
    except UnidentifiedImageError:
        raise Refused(415, f"the body is not an image: expected {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Refused(413, f"the image has more than {most_pixels:,} pixels, the limit of this server") from None
    except Exception as error:  # Pillow's readers raise nearly everything on damaged files
        raise Refused(422, f"the image is damaged: {error or type(error).__name__}") from None
    with image:
        width, height = image.size
        if width * height > most_pixels:
            text = f"the image has {width} x {height} pixels, more than {most_pixels:,}, the limit of this server"
            raise Refused(413, text)
        try:
            return upright_rgb(image)
        except Exception as error:
            raise Refused(422, f"the image is damaged: {error or type(error).__name__}") from None
