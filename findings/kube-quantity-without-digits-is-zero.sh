#!/usr/bin/env bash
# k8s.io/apimachinery v0.37.1, resource.ParseQuantity: a quantity without a digit is read as 0, with sign, point, suffix or
# exponent. The documented grammar requires at least one digit, and the empty text is refused.
#
# Seen with v0.37.1: "-T" = 0, "." = 0, ".Gi" = 0, "+" = 0, ".e0" = 0; "" and "Gi.": error. So a mistyped amount such as ".Gi"
# is stored as zero, where another parser of the grammar refuses it.
#
# Needs Go 1.26 or later (or GOTOOLCHAIN=auto). Exits 1 if the behavior changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
go mod init quantity >log 2>&1
go get k8s.io/apimachinery/pkg/api/resource@v0.37.1 >>log 2>&1 || { cat log; exit 1; }
cat > main.go <<'GO'
package main

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"
)

func main() {
	for _, text := range []string{"-T", ".", ".Gi", "+", ".e0", "", "Gi."} {
		quantity, err := resource.ParseQuantity(text)
		if err != nil {
			fmt.Printf("%q error\n", text)
			continue
		}
		fmt.Printf("%q = %s\n", text, quantity.String())
	}
}
GO
go run . | tee seen
cat > expected <<'OUT'
"-T" = 0
"." = 0
".Gi" = 0
"+" = 0
".e0" = 0
"" error
"Gi." error
OUT
diff expected seen || { echo "the behavior has changed"; exit 1; }
echo "k8s.io/apimachinery v0.37.1 reads quantities without digits as 0"
