"""How one rank runs one op on its pieces, without communication.

Most ops run as they are, on smaller tensors. Where an argument is a size, it becomes the piece's size; where what an op
does depends on *which* piece a rank has (a vocabulary shard, ``arange``), the rank's offset enters. The tables of this
package and the rules of ``planner.rules`` belong together, and are proved together.
"""

from meshwright.passes.local import forms_arguments, forms_attention, forms_offset  # noqa: F401  (each registers its ops)
from meshwright.passes.local.piece import Call, Form, Piece, register_form, run_local

__all__ = ["Call", "Form", "Piece", "register_form", "run_local"]
