"""llama.cpp's converter, told that our tokenizer is of Kimi's kind, which it recognises by the fingerprint of one vocabulary only.

    python convert_to_gguf.py LLAMA_CPP_SOURCES CHECKPOINT --outtype f32 --outfile MODEL.gguf

K3's pre-tokenisation pattern is the same for every vocabulary, so the answer `kimi-k2` is right for ours too.
"""

import runpy
import sys


def main():
    sources = sys.argv[1]
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "kimi-k2"
    sys.argv = [f"{sources}/convert_hf_to_gguf.py", *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
