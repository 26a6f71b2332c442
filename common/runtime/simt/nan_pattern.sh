# g++ -pipe -wrapper starts its programs by this: what the compiler writes for the assembler gets
# changed, so that what -ftrivial-auto-var-init=pattern puts into variables is NaN. g++'s pattern is
# bytes of 0xFE, -1.7e38 in float and bf16, which a product with 0 hides. In whole words that becomes
# 0xFFFE, again and again: NaN in float, bf16 and fp16, and as an index -65538, far out of bounds.
# Vectors of the pattern are written byte by byte, floats in hexadecimal from g++ 13 on.
set -o pipefail
case ${1##*/} in
cc1*)
    "$@" | sed -E \
        -e 's/-72340172838076674([^0-9]|$)/-281483566907394\1/g' \
        -e 's/-16843010([^0-9]|$)/-65538\1/g' \
        -e 's/0xfefefefefefefefe([^0-9a-f]|$)/0xfffefffefffefffe\1/g' \
        -e 's/0xfefefefe([^0-9a-f]|$)/0xfffefffe\1/g' \
        -e '/^[[:space:]]\.byte[[:space:]]-2$/{N;s/-2(\n[[:space:]]\.byte[[:space:]])-2$/-2\1-1/;}'
    ;;
*)
    exec "$@"
    ;;
esac
