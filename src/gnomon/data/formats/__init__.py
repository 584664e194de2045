"""Chat formats, one file each: `chat_format` in `gnomon.data.chat` finds them by file name, or by a path `your_pkg.chatml:Format`."""
