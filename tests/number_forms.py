"""Every form that numbers of the curriculum can have."""

from mamba3.data.arithmetic_forms import ANSWER_ORDERS, OPERANDS, Form

# Columns are answered from the last digit on.
FORMS = [
    Form(answer_order=order, operands=layout)
    for order in ANSWER_ORDERS
    for layout in OPERANDS
    if (order, layout) != ("msd_first", "columns")
]
