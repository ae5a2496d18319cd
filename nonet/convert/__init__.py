"""Models from elsewhere into standard Hugging Face directories, and out of them into GGUF.

Reading order: importer.py (what a source is, and the directory it becomes), gguf_reader.py (metadata and weights),
gguf_tokenizer.py (the vocabulary), parity.py (the check against transformers). Out: gguf_writer.py (the file),
gguf_plan.py (what goes into it), gguf_decoder.py and gguf_k3.py (by architecture), gguf_vocab.py (the vocabulary).
"""
