"""coserve: fine-tune and serve many LoRA adapters from one copy of a base model."""

__version__ = "0.1.0"
