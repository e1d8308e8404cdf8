"""Where in a YAML file a value stands, for messages about it."""

import re

import yaml


def line_of(text: str, key: str) -> int | None:
    """The line, from 1, of a dotted key such as `classes[1].weight`, or of the closest thing above it that is there.

    None if the text is no YAML mapping.
    """
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    line = None
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == part), None)
            if found is None:
                break
            name, node = found
            line = name.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            break
    return line
