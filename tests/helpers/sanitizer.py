"""A plugin of pytest that builds the C module with AddressSanitizer."""

from typing import Any

from partita.runtime import private_names

FLAGS = ("-g", "-fno-omit-frame-pointer", "-fsanitize=address")


def pytest_configure(config: Any) -> None:
    build = private_names.build_c_module

    def with_sanitizer(source: str, name: str, flags: list[str]) -> Any:
        return build(source, name, [*flags, *FLAGS])

    private_names.build_c_module = with_sanitizer
