// Command schema checks files with dashboards against the types that Grafana generates from its schema: unknown fields,
// missing fields and fields of another type are errors.
//
//	schema cluster.json gpus.json
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	// Types of the options of panels and of the queries of data sources.
	plugins.RegisterDefaultPlugins()
	failed := len(os.Args) < 2
	for _, file := range os.Args[1:] {
		if err := check(file); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", file, err)
			failed = true
		}
	}
	if failed {
		os.Exit(1)
	}
}

func check(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var decoded dashboard.Dashboard
	err = decoded.UnmarshalJSONStrict(text)
	// The result of a correct file is an empty list, not nil.
	if errs := (cog.BuildErrors)(nil); errors.As(err, &errs) && len(errs) == 0 {
		return nil
	}
	return err
}
