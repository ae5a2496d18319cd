"""Pure tensor functions: a slow definition beside each fast path, same signature, parity-tested.

Shape letters used in suffixes all over the project:
    B sequences   T positions   D model width   H heads   K key width per head   V value width per head
    C positions in a chunk   N chunks   L cached positions   W vocabulary
"""
