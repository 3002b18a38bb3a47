"""timm's Swin, PVT v2 and XCiT: whole blocks are exchanged in a copy of the model."""
