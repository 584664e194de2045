"""The released `config.json` as transformers' configuration class: what `auto.py` registers for `kimi_k3`."""

from typing import Any, Self

from gnomon.errors import ConfigError

try:
    from transformers import PreTrainedConfig
except ImportError as error:
    raise ConfigError(f"transformers cannot be imported ({error}); install it: pip install 'gnomon[hf]'") from None


class KimiK3Config(PreTrainedConfig):
    """The released `config.json` as it stands; `text_config` has the shape."""

    model_type = "kimi_k3"

    def get_text_config(self, *_: Any, **__: Any) -> Self:
        """Itself: sizes are asked for here, and `text_config` is a plain dictionary."""
        return self

    @property
    def fields(self) -> dict[str, Any]:
        """The text configuration."""
        return dict(self.text_config)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return int(self.fields["vocab_size"])

    @property
    def hidden_size(self) -> int:
        """Width of the stream."""
        return int(self.fields["hidden_size"])

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return int(self.fields["num_hidden_layers"])

    @property
    def max_position_embeddings(self) -> int:
        """The longest context that the checkpoint promises; nothing here depends on it."""
        return int(self.fields["max_position_embeddings"])
