// Command go-client lists the cards through go-nvml.
package main

import (
	"fmt"
	"os"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func check(what string, result nvml.Return) {
	if result != nvml.SUCCESS {
		fmt.Fprintln(os.Stderr, what+":", nvml.ErrorString(result))
		os.Exit(1)
	}
}

func main() {
	check("init", nvml.Init())
	count, result := nvml.DeviceGetCount()
	check("count", result)
	for index := range count {
		device, result := nvml.DeviceGetHandleByIndex(index)
		check("handle", result)
		name, result := device.GetName()
		check("name", result)
		memory, result := device.GetMemoryInfo_v2()
		check("memory", result)
		uuid, result := device.GetUUID()
		check("uuid", result)
		fmt.Println(name, memory.Total>>20, uuid)
	}
	check("shutdown", nvml.Shutdown())
}
