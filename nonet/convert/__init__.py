"""Models from elsewhere into standard Hugging Face directories.

Reading order: importer.py (what a source is, and the directory it becomes), gguf_reader.py (metadata and weights),
gguf_tokenizer.py (the vocabulary), parity.py (the check against transformers).
"""
